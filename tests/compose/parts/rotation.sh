# Sourced by tests/compose/run: docs/operations/keys.md, while devices go on.
say "$(committed) rounds are committed: another server key"
key() { compose run --rm -T migrate server-key "$@"; }
former=$(key show --json | field 'd["current"]')
key rotate
for number in 1 2; do
  compose exec -T --index $number api fedpress doctor --url http://api:8080 | grep -E '^ok +keys' || fail "api $number lacks the next key"
done
key switch
current=$(key show --json | field 'd["current"]')
[ "$current" != "$former" ] || fail "the key is the same"
signs() { docker logs "$1" 2>&1 | grep -q "signing with server key $current from now on"; }
for server in $(compose ps -q api worker scheduler); do until_true 30 "a server's change of its key" signs "$server"; done
followed() { [ "$(compose --profile demo logs device 2>&1 | grep -c "the server signs with key $current now")" -eq 3 ]; }
until_true 120 "the devices' change of their server's key" followed
echo "both api servers, the worker and the scheduler sign with $current, and three devices have followed it"
at=$(committed)
until_true 120 "two rounds more" at_least $((at + 2))
key retire
key show | grep -E "^former +$former +not on this machine"
compose run --rm -T --no-deps --entrypoint ls migrate -l /keys
