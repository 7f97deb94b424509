#!/bin/sh
# Whether a request gets through the proxy to a server that can work; by the operators' port where devices are
# asked for certificates.
if [ -s /tmp/tls.conf ]; then scheme=https; else scheme=http; fi
if grep -q ssl_verify_client /tmp/devices.conf; then port=8081; else port=8080; fi
exec curl -fsSk --max-time 4 -o /dev/null "$scheme://127.0.0.1:$port/readyz"
