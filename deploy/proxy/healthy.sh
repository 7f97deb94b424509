#!/bin/sh
# Whether a request gets through the proxy to a server that can work.
if [ -s /tmp/tls.conf ]; then scheme=https; else scheme=http; fi
exec curl -fsSk --max-time 4 -o /dev/null "$scheme://127.0.0.1:8080/readyz"
