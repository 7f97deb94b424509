# Sourced by tests/compose/run: compose.embedded.yml, and its backup in new volumes.
down
say "one container on SQLite"
FEDPRESS_ADMIN_TOKEN=$(cat "$FEDPRESS_SECRETS/admin-token")
export FEDPRESS_ADMIN_TOKEN COMPOSE_FILE=compose.embedded.yml
ask() { curl -fsS --max-time 10 -H "Authorization: Bearer $FEDPRESS_ADMIN_TOKEN" "$devices$1"; }
server_of() { compose run --rm -T -v "$scratch/backups:/backups" server "$@"; }
compose --profile demo up -d
until_true 180 "ten rounds" at_least 10
server_of backup /backups/one.tar --with-keys
until_true 180 "the task's end" at_least 30
compose ps --format 'table {{.Name}}\t{{.Image}}\t{{.Status}}'
ask /v1/tasks/digits | field '"task", d["task"], d["state"], "round", d["round"]'

say "the backup, in new volumes"
compose stop server
export COMPOSE_PROJECT_NAME=fedpress-test-2
server_of restore /backups/one.tar
compose up -d --wait
ask /v1/tasks/digits | field '"task", d["task"], d["state"], "round", d["round"]'
[ "$(committed)" -ge 10 ] || fail "rounds of the backup are missing"
