#!/bin/sh
# Mooncake without CUDA into the folder $1 by the interpreter $2, for `sglang-hisparse demo --pd` on a CPU; and libibverbs, to
# which it is linked although TCP needs no RDMA, where this system has none: unpacked beside it, nothing is installed.
set -e
python=$2; mkdir -p "$1/lib"; cd "$1"
"$python" -m pip install -q --disable-pip-version-check --no-deps --target . mooncake-transfer-engine-non-cuda==0.3.13.post1
if ! "$python" -c "import ctypes; ctypes.CDLL('libibverbs.so.1')" 2>/dev/null; then
    command -v apt-get >/dev/null || { echo "Mooncake needs libibverbs: install your system's package of it" >&2; exit 1; }
    apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 # as anybody; after `apt-get update` on a new machine
    for package in *.deb; do dpkg -x "$package" system; done
    find system -name '*.so.*' -exec cp -a {} lib/ \;
    rm -r ./*.deb system
fi
