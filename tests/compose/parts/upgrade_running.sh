# Sourced by tests/compose/run for each commit in OLD: docs/operations/upgrade.md with that release's own compose
# file and image, in the midst of a task, while devices go on. Where its schema is an older one, servers of now
# refuse to start before the migration, and servers of then after it.
say "the release of $commit"
old=$scratch/old-$(git rev-parse --short "$commit")
mkdir "$old"
git archive "$commit" | tar -x -C "$old"
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
old_compose up -d --wait
field '__import__("json").dumps({**d, "rounds": 10_000})' < "$old/examples/compose/task.json" > "$scratch/task.json"
old_compose --profile demo run --rm -T --no-deps -v "$scratch/task.json:/app/task.json:ro" open-task
old_compose --profile demo up -d
until_true 180 "round 4" at_least 4
old_compose run --rm -T --no-deps -v "$scratch/backups:/backups" worker backup "/backups/${old##*/}.tar"
backups_of verify "/backups/${old##*/}.tar"

say "$(committed) rounds are committed: the release of now"
compose stop api worker scheduler
before=$(schema)
is_older() { ! git diff --quiet "$commit" -- server/fedpress_server/migrations/versions; }
if is_older; then refuses api; fi
compose up -d --wait
compose logs --no-log-prefix migrate
at=$(committed)
until_true 120 "three rounds more with devices of $commit" at_least $((at + 3))
if is_older; then
  [ "$(schema)" != "$before" ] || fail "the schema is still $before: nothing was upgraded"
  if old_compose run --rm -T --no-deps api >"$scratch/refused" 2>&1; then fail "an older server took the database"; fi
  grep -h 'the database has schema' "$scratch/refused" || fail "an older server: $(tail -n 3 "$scratch/refused")"
else
  [ "$(schema)" = "$before" ] || fail "the schema was $before, is $(schema), and no migration is new"
fi
compose --profile demo up -d device
at=$(committed)
until_true 120 "three rounds more with devices of now" at_least $((at + 3))
command_of task cancel digits --why "upgraded" | grep -E '^(state|rounds)'
ask /v1/tasks/digits/rounds | field '"attempts:", len(d), "committed:", sum(r["state"] == "committed" for r in d), "abandoned:", [(r["round"], r.get("reason")) for r in d if r["state"] == "abandoned"]'
until_true 60 "the devices' end" devices_end
grep -oE 'task digits cancelled: [^;]*' "$scratch/devices"
if grep -E 'task digits cancelled: .* [1-9][0-9]* pending' "$scratch/devices"; then fail "a device has an upload without an outcome"; fi
