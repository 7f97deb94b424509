# Sourced by tests/compose/run: docs/operations/restore.md, of the backup from before the change of the key.
# Devices and secrets are all that is left; the keys were copied as docs/operations/compose.md says.
compose run --rm -T --no-deps --entrypoint tar migrate -C /keys -cf - . > "$scratch/keys.tar"
until_true 120 "two rounds that the backup has not" at_least $((backed_up + 2))
say "$(committed) rounds are committed: the machine is lost, and the backup has some $backed_up"
compose "${everything[@]}" logs >"$scratch/logs" 2>&1
echo "restarts: api $(restarts "$api"), database $(restarts "$database")"
compose rm --stop --force --volumes proxy api worker scheduler prepare migrate postgres store 2>/dev/null
docker volume rm "${COMPOSE_PROJECT_NAME}"_{database,store,keys} >/dev/null
gone=$SECONDS
compose up -d --wait postgres store
if backups_of verify /backups/today.tar --key-id "$current"; then fail "another key's backup was taken"; fi
backups_of restore /backups/today.tar --key-id "$former"
compose run --rm -T --no-deps --entrypoint tar migrate -C /keys -xf - < "$scratch/keys.tar"
compose up -d --wait
echo "every server is healthy $((SECONDS - gone)) s after"
until_true 120 "a round by the restored server" at_least $((backed_up + 1))
heard() { [ "$(compose --profile demo logs device 2>&1 | grep -c 'the server was restored from a backup (restore 1)')" -ge 3 ]; }
until_true 120 "the devices' hearing of it" heard
key show | grep "$current" | head -n 1
