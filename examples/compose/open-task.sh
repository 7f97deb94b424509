#!/bin/sh
# Registers the demo's model, starts its task and leaves an enrolment token for the devices.
set -eu
[ ! -s /data/token ] || exit 0  # a second `docker compose up` goes on with the first one's task
python /app/digits.py /tmp/model.safetensors
fedpress task create /app/task.json /tmp/model.safetensors
(umask 077; fedpress devices token create --uses 100 --note "compose demo" > /data/token.new)
mv /data/token.new /data/token
