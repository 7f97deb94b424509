# Sourced by tests/compose/run: docs/operations/tls.md, with the proxy's certificate in $FEDPRESS_TLS.
say "certificates of devices at the proxy"
certificates=$scratch/certificates
mkdir "$certificates"
(
  cd "$certificates"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=devices \
    -keyout devices-ca.key -out devices-ca.crt
  printf 'extendedKeyUsage=clientAuth\n' > client.ext
  for name in camera-1 camera-2; do
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$name -keyout $name.key -out $name.csr
    openssl x509 -req -in $name.csr -CA devices-ca.crt -CAkey devices-ca.key -CAcreateserial -days 365 \
      -extfile client.ext -out $name.crt
  done
  printf '%s\n' '[ca]' 'default_ca = list' '[list]' 'database = revoked.txt' 'default_md = sha256' 'default_crl_days = 30' > list.cnf
  touch revoked.txt
  openssl ca -config list.cnf -cert devices-ca.crt -keyfile devices-ca.key -revoke camera-2.crt
  openssl ca -config list.cnf -cert devices-ca.crt -keyfile devices-ca.key -gencrl -out devices.crl
) >"$scratch/openssl" 2>&1 || fail "$(tail -n 3 "$scratch/openssl")"
chmod 0444 "$certificates"/*.key
cp "$certificates/devices-ca.crt" "$FEDPRESS_TLS/clients.crt"
cp "$certificates/devices.crl" "$FEDPRESS_TLS/clients.crl"
compose restart proxy
until_true 60 "the operators' port" curl -fsS --max-time 5 --cacert "$FEDPRESS_TLS/tls.crt" https://localhost:18081/readyz

task=$scratch/task
install -d -m 0777 "$task"
compose --profile demo run --rm -T --no-deps -v "$task:/task" --entrypoint python open-task /app/digits.py /task/model.safetensors
field '__import__("json").dumps({**d, "task": "certified", "rounds": 2, "cohort": {"size": 1, "minimum": 1}})' \
  < examples/compose/task.json > "$task/task.json"
by_api() { compose run --rm -T --no-deps -v "$task:/task:ro" -e FEDPRESS_URL=http://api:8081 worker "$@"; }
by_api task create /task/task.json /task/model.safetensors
FEDPRESS_TOKEN=$(by_api token create --uses 1)
export FEDPRESS_TOKEN
join() { # OPTIONS...: a new device by TLS
  compose --profile demo run --rm -T --no-deps -v "$FEDPRESS_TLS/tls.crt:/tls/tls.crt:ro" -v "$certificates:/certificates:ro" \
    -e FEDPRESS_TOKEN --entrypoint fedpress device client join https://proxy:8080 --app digits:trainer --task certified \
    --state-dir /tmp/state --ca /tls/tls.crt "$@"
}
refused() { # WHO OPTIONS...
  local who=$1
  shift
  if join "$@" >"$scratch/refused" 2>&1; then fail "a device $who was let in"; fi
  grep -q 'client certificate of the known authority' "$scratch/refused" || fail "$(cat "$scratch/refused")"
  echo "a device $who: $(tail -n 1 "$scratch/refused")"
}
refused "without a certificate"
refused "whose certificate was revoked" --client-certificate /certificates/camera-2.crt --client-key /certificates/camera-2.key
join --client-certificate /certificates/camera-1.crt --client-key /certificates/camera-1.key \
  >"$scratch/let-in" 2>&1 || fail "a device with a certificate was not let in: $(tail -n 3 "$scratch/let-in")"
echo "a device with a certificate: $(grep -oE 'task certified finished: [^;]*' "$scratch/let-in")"
