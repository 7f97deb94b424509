# Sourced by tests/compose/run: docs/operations/keys.md, while devices go on, with a backup in the midst of it.
say "$(committed) rounds are committed: another server key"
key() { compose run --rm -T migrate server key "$@"; }
shown() { compose exec -T worker fedpress server key show --json | field "d['$1']"; }
former=$(shown current)
key rotate
current=$(shown next)
for number in 1 2; do
  compose exec -T --index $number api fedpress server doctor --url http://api:8080 | grep -E '^ok +keys' || fail "api $number lacks the next key"
done
backups_of backup /backups/today.tar
backed_up=$(committed) # or less
key switch
signs() { docker logs "$1" 2>&1 | grep "signing with server key $current from now on"; }
for server in $(compose ps -q api worker scheduler); do until_true 30 "a server's change of its key" signs "$server"; done
followed() { [ "$(compose --profile demo logs device 2>&1 | grep -c "the server signs with key $current now")" -eq 3 ]; }
until_true 120 "the devices' change of their server's key" followed
echo "both api servers, the worker and the scheduler sign with $current, and three devices have followed it"
at=$(committed)
until_true 120 "two rounds more" at_least $((at + 2))
key retire | tee "$scratch/retired"
[ "$(cat "$scratch/retired")" = "key $former is erased" ] || fail "the former key is there"
