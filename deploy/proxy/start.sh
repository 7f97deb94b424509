#!/bin/sh
# Start nginx, with TLS if /tls holds tls.crt and tls.key, and without if it holds neither.
set -eu
if [ -e /tls/tls.crt ] || [ -e /tls/tls.key ]; then
  for file in /tls/tls.crt /tls/tls.key; do
    [ -r "$file" ] || { echo "fedpress: the proxy cannot read $file: TLS needs tls.crt and tls.key, readable by user $(id -u)" >&2; exit 1; }
  done
  ssl=" ssl"
  printf '%s\n' 'ssl_certificate /tls/tls.crt;' 'ssl_certificate_key /tls/tls.key;' > /tmp/tls.conf
else
  ssl=""
  : > /tmp/tls.conf
fi
echo "listen 8080$ssl;" > /tmp/devices.conf
# ... and devices are asked for certificates if it holds clients.crt, the authorities that sign them.
if [ -e /tls/clients.crt ]; then
  [ -n "$ssl" ] && [ -r /tls/clients.crt ] || { echo "fedpress: clients.crt needs tls.crt and tls.key beside it, all readable by user $(id -u)" >&2; exit 1; }
  printf '%s\n' 'ssl_client_certificate /tls/clients.crt;' 'ssl_verify_client on;' 'ssl_verify_depth 3;' >> /tmp/devices.conf
  if [ -e /tls/clients.crl ]; then echo 'ssl_crl /tls/clients.crl;' >> /tmp/devices.conf; fi
fi
echo "listen 8081$ssl;" > /tmp/operators.conf
exec nginx -e stderr -c /etc/fedpress/nginx.conf -g 'daemon off;'
