#!/bin/sh
# Starts a role in a container: takes the token from the shared secret file and builds the Redis URL with it.
set -eu
role=$1; shift
if [ -z "${SEXTET_TOKEN:-}" ]; then
    SEXTET_TOKEN=$(cat "${SEXTET_TOKEN_FILE:-/run/sextet/token}"); export SEXTET_TOKEN
fi
: "${SEXTET_REDIS_URL:=redis://:${SEXTET_TOKEN}@${SEXTET_REDIS_HOST:-redis}:6379/0}"; export SEXTET_REDIS_URL
exec python -m "services.$role" "$@"
