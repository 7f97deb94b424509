# Sourced by tests/compose/run: docs/operations/restore.md, of the backup from before the change of the key.
# Devices and secrets are all that is left; the keys were copied as docs/operations/compose.md says.
compose run --rm -T --no-deps --entrypoint tar migrate -C /keys -cf - . > "$scratch/keys.tar"
say "$(committed) rounds are committed: the machine is lost, the backup has $backed_up at most"
compose "${everything[@]}" logs >"$scratch/logs" 2>&1
echo "restarts: api $(restarts "$api"), database $(restarts "$database")"
compose kill proxy api worker scheduler postgres store
compose rm --force --volumes proxy api worker scheduler prepare migrate postgres store >/dev/null 2>&1
docker volume rm "${COMPOSE_PROJECT_NAME}"_{database,store,keys,caches} >/dev/null
gone=$SECONDS
compose up -d --wait postgres store
if backups_of verify /backups/today.tar --key-id "$current"; then fail "another key's backup was taken"; fi
backups_of restore /backups/today.tar --key-id "$former"
compose run --rm -T --no-deps --entrypoint tar migrate -C /keys -xf - < "$scratch/keys.tar"
compose up -d --wait
echo "every server is healthy $((SECONDS - gone)) s after"
until_true 120 "three rounds by the restored server" at_least $((backed_up + 3))
heard() { [ "$(compose --profile demo logs device 2>&1 | grep -c 'the server was restored from a backup (restore 1)')" -ge 3 ]; }
until_true 120 "the devices' hearing of it" heard
[ "$(shown current)" = "$current" ] || fail "the restored server signs with the former key"
echo "the restored server signs with $current, which the backup does not know"
