#!/bin/sh
# The first program of the virtual machine. Everything that may change lives on the second disk.
mount -t devtmpfs dev /dev && mkdir -p /skerry && mount /dev/nvme1n1 /skerry && exec python3 /skerry/agent.py
echo "skerry-init: the second disk did not start" >/dev/console
