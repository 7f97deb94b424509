# Sourced by tests/compose/run where OLD names a commit of an older schema: docs/operations/upgrade.md with that
# release's own compose file and image, in the midst of a task, while devices go on.
say "the release of $OLD"
old=$scratch/old
mkdir "$old"
git archive "$OLD" | tar -x -C "$old"
# shellcheck disable=SC2086
docker build ${BUILD:-} -q -f "$old/server/Dockerfile" -t fedpress-server:old "$old" >/dev/null
# shellcheck disable=SC2086
docker build ${BUILD:-} -q -f "$old/server/Dockerfile" -t fedpress-demo:old --build-arg EXTRAS=demo "$old" >/dev/null
{
  echo services:
  for service in prepare migrate api worker scheduler; do echo "  $service: {image: fedpress-server:old}"; done
  for service in open-task device; do echo "  $service: {image: fedpress-demo:old}"; done
} > "$scratch/old.yml"
old_compose() { docker compose --progress quiet --project-directory "$old" -f "$old/docker-compose.yml" -f "$scratch/old.yml" "$@"; }
old_compose --profile demo up -d
until_true 180 "round 4" at_least 4
old_compose run --rm -T --no-deps -v "$scratch/backups:/backups" worker backup /backups/before.tar
backups_of verify /backups/before.tar

say "$(committed) rounds are committed: the release of now"
compose stop api worker scheduler
before=$(schema)
refuses api
compose up -d --wait
compose logs --no-log-prefix migrate
[ "$(schema)" != "$before" ] || fail "$OLD has the schema of now: nothing was upgraded"
at=$(committed)
until_true 120 "three rounds more with devices of $OLD" at_least $((at + 3))
if old_compose run --rm -T --no-deps api >"$scratch/refused" 2>&1; then fail "an older server took the database"; fi
grep -h 'the database has schema' "$scratch/refused" || fail "an older server: $(tail -n 3 "$scratch/refused")"
compose --profile demo up -d device
until_true 180 "the task's end" at_least 30
ask /v1/tasks/digits | field '"task", d["task"], d["state"], "round", d["round"]'
