"""``sglang-hisparse doctor``: looks at an installation, a machine and a launch command, and says what will go wrong.

Standard library only, and it writes nothing. Every probe gathers facts in a process of its own, with a time limit, so
that whatever a broken package or driver does there is a finding; then it judges the facts, which is plain Python.
`probes.PROBES` is the table of all probes, `examine` runs it, `report` prints what came of it.
"""
