# Sourced by tests/compose/run: every fault of benchmarks/faults.py, while its devices take part.
say "up, on file systems of their own for the database and the store"
down_all
deploy/make-secrets "$FEDPRESS_SECRETS" >/dev/null
export COMPOSE_FILE=docker-compose.yml:tests/compose/parts/faults.yml
docker volume rm --force "${COMPOSE_PROJECT_NAME}_database" "${COMPOSE_PROJECT_NAME}_store" >/dev/null
compose create >/dev/null
# Keeps both mounted while their services are away, and fills them.
docker run -d --name "$COMPOSE_PROJECT_NAME-holder" --network none --user 0 --entrypoint sleep \
  -v "${COMPOSE_PROJECT_NAME}_database:/database" -v "${COMPOSE_PROJECT_NAME}_store:/store" postgres:15 infinity >/dev/null
compose up -d --wait
address=$(docker inspect --format "{{(index .NetworkSettings.Networks \"${COMPOSE_PROJECT_NAME}_inside\").IPAddress}}" "$(compose ps -q postgres)")
status=0
"${PYTHON:-python3}" benchmarks/faults.py "$@" --token-file "$FEDPRESS_SECRETS/admin-token" \
  --database "$(sed "s/@postgres:/@$address:/" "$FEDPRESS_SECRETS/database-url")" \
  --json "${FAULTS_JSON:-build/faults.json}" || status=$?
compose logs --no-log-prefix api worker scheduler | grep -A20 Traceback | head -n 60 || true
docker rm --force "$COMPOSE_PROJECT_NAME-holder" >/dev/null
[ "$status" = 0 ] || fail "the faults did not pass"
