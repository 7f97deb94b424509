# Sourced by tests/compose/run: docs/operations/upgrade.md, from the database that an earlier release has left
# in mid-round (tests/golden). That one lies in the repository, needs no second image, and is as old as any.
say "an older release's database"
golden=$scratch/golden
compose up -d --wait postgres store
python3 tests/compose/golden_state.py tests/golden/server-0.1.0-postgresql.zip "$golden"
schema() { sql -At -c 'SELECT version_num FROM alembic_version'; }
sql() { compose exec -T postgres psql -q -v ON_ERROR_STOP=1 -U fedpress -d fedpress "$@"; }
sql < "$golden/database.sql" >/dev/null
tar -C "$golden/data" -cf - server-key.pem authority-key.pem \
  | compose run --rm -T --no-deps --entrypoint tar migrate -C /keys -xf -
compose run --rm -T --no-deps -v "$golden/data:/golden:ro" -v "$PWD/tests/compose:/compose:ro" --entrypoint python worker \
  /compose/into_store.py /golden

refuses() { # SERVICE ARGUMENTS...: whether it ends, with a sentence on the schema
  if timeout 60 docker compose --progress quiet run --rm -T --no-deps "$@" >"$scratch/refused" 2>&1; then
    fail "$* did not refuse"
  fi
  grep -h 'the database has schema' "$scratch/refused" || fail "$*: $(tail -n 3 "$scratch/refused")"
}
refuses api
refuses worker server doctor
refuses worker server backup /tmp/before.tar
compose up -d --wait
compose logs --no-log-prefix migrate
compose exec -T api fedpress server doctor --url http://api:8080 | grep database
docker run --rm --network "${COMPOSE_PROJECT_NAME}_outside" -v "$PWD/tests:/repository/tests:ro" -v "$golden/devices.json:/devices.json:ro" \
  -w /repository --entrypoint python fedpress-demo -m tests.compose.golden_devices http://proxy:8080 /devices.json
ask /v1/tasks/digits | field '"task", d["task"], d["state"], "round", d["round"]'

say "a newer release's database"
compose stop api worker scheduler
sql -c "UPDATE alembic_version SET version_num = '9001'" -c "INSERT INTO schema_releases VALUES ('9001', '9.0')"
refuses api
refuses migrate
echo "the schema is left at $(schema)"
