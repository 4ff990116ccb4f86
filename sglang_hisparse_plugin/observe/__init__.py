"""What HiSparse does in a running server, made visible: counters, Prometheus metrics, log lines, traces.

Off unless the server has ``--enable-metrics``, or a log line or a trace was asked for; then no tensor, thread or metric
exists. `start.py` says what is switched on by what.
"""
