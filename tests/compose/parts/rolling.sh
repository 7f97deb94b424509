# Sourced by tests/compose/run: docs/operations/compose.md, "Without a pause", while devices train and wait.
say "under load: 44 devices, 40 of which wait"
load=$COMPOSE_PROJECT_NAME-load
docker rm --force "$load" >/dev/null 2>&1 || true
docker run -d --name "$load" --network "${COMPOSE_PROJECT_NAME}_outside" -v "$PWD/tests:/repository/tests:ro" \
  -v "$FEDPRESS_SECRETS/admin-token:/admin-token:ro" -w /repository --entrypoint python fedpress-demo \
  -m tests.compose.load http://proxy:8080 http://proxy:8081 /admin-token >/dev/null
under_load() { docker logs "$load" 2>/dev/null | grep 'under load'; }
until_true 180 "a round under load" under_load
goes_on() { [ "$(docker inspect --format '{{.State.Running}}' "$load")" = true ] || fail "$(docker logs "$load" 2>&1 | tail -n 30)"; }
servers() { compose ps --quiet api | sort; }
at_first=$(servers)

say "scaled up, and down again"
compose up -d --wait --no-deps --no-recreate --scale api=4 api
[ "$(servers | wc -l)" -eq 4 ] || fail "there are not four api servers"
sleep 5
compose up -d --wait --no-deps --no-recreate --scale api=2 api
[ "$(servers | wc -l)" -eq 2 ] || fail "there are not two api servers"
goes_on

say "replaced, by api servers of other settings"
at_first=$(servers)
FEDPRESS_LOG_LEVEL=warning deploy/replace-api
[ "$(servers | wc -l)" -eq 2 ] || fail "there are not two api servers"
for server in $(servers); do
  if grep -q "$server" <<< "$at_first"; then fail "api server $server was not replaced"; fi
  docker inspect --format '{{.Config.Env}}' "$server" | grep -q FEDPRESS_LOG_LEVEL=warning || fail "$server has the settings of before"
done
FEDPRESS_LOG_LEVEL=warning compose up -d --wait --no-deps worker scheduler
goes_on
sleep 5
docker kill --signal USR1 "$load" >/dev/null

say "restarted, all api servers at once: 503 while none is there"
compose restart api
until_true 60 "readiness again" curl -fsS --max-time 5 "$devices/readyz"
sleep 5
goes_on
docker kill --signal TERM "$load" >/dev/null
status=$(timeout 180 docker wait "$load")
docker logs "$load" 2>&1 | tail -n 20
[ "$status" = 0 ] || fail "not all requests under load were answered as they should be"
docker rm "$load" >/dev/null
compose logs --no-log-prefix api >"$scratch/replaced" 2>&1
if grep -q Traceback "$scratch/replaced"; then fail "an api server failed"; fi

say "no container has a volume that a plain down leaves behind without a name"
for container in $(compose "${everything[@]}" ps --all --quiet); do
  docker inspect --format '{{range .Mounts}}{{if eq .Type "volume"}}{{.Name}}{{"\n"}}{{end}}{{end}}' "$container"
done | sort -u | grep . > "$scratch/volumes"
if grep -v "^${COMPOSE_PROJECT_NAME}_" "$scratch/volumes"; then fail "these volumes have no name"; fi
tr '\n' ' ' < "$scratch/volumes"; echo
