#!/usr/bin/env bash
# A federation on this machine: one SuperLink, five SuperNodes, TLS and node authentication; runs the app in this
# folder, shows the weights that were learned, and stops everything it started. Keys and certificates are made on the
# spot and thrown away.
#
#   examples/flower/federation.sh                       # FedLAW
#   examples/flower/federation.sh 'strategy="fedavg"'   # the same app with another run config
#
# PORT (18443), NODE_PORT (19094 and the four after it) and WORK (a temporary folder, removed at the end unless given).
set -euo pipefail
set -m   # every background job is a process group of its own, so that its children can be stopped with it

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PORT=${PORT:-18443} NODE_PORT=${NODE_PORT:-19094} NODES=5 LIMIT=${LIMIT:-900}
if [ -x "$HERE/../../.venv/bin/flwr" ]; then PATH="$HERE/../../.venv/bin:$PATH"; fi
for tool in flwr flower-superlink flower-supernode openssl ssh-keygen; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: pip install 'fedlaw[flower,lab]', and install openssl and ssh"; exit 2; }
done

KEEP=${WORK:+yes}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
export FLWR_HOME="$WORK/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 OMP_NUM_THREADS=1
mkdir -p "$FLWR_HOME"

STARTED=()
stop() {
  trap - EXIT INT TERM
  for pid in "${STARTED[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in $(seq 50); do
    local left=0
    for pid in "${STARTED[@]}"; do kill -0 -- "-$pid" 2>/dev/null && left=1; done
    [ "$left" = 0 ] && break
    sleep 0.2
  done
  for pid in "${STARTED[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
  [ -n "$KEEP" ] || rm -rf "$WORK"
}
trap stop EXIT
trap 'exit 130' INT TERM

echo "== certificates and keys in $WORK"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=fedlaw example CA" \
  -keyout "$WORK/ca.key" -out "$WORK/ca.crt" 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout "$WORK/server.key" -out "$WORK/server.csr" 2>/dev/null
openssl x509 -req -in "$WORK/server.csr" -CA "$WORK/ca.crt" -CAkey "$WORK/ca.key" -CAcreateserial -days 2 \
  -extfile <(printf "subjectAltName=DNS:localhost,IP:127.0.0.1") -out "$WORK/server.pem" 2>/dev/null
cat > "$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "loopback"

[superlink.loopback]
address = "127.0.0.1:$PORT"
root-certificates = "$WORK/ca.crt"
TOML

echo "== SuperLink on 127.0.0.1:$PORT"
flower-superlink --host 127.0.0.1 --port "$PORT" --ssl-ca-certfile "$WORK/ca.crt" --ssl-certfile "$WORK/server.pem" \
  --ssl-keyfile "$WORK/server.key" --enable-supernode-auth --disable-runtime-dependency-installation \
  --database "$WORK/state.db" > "$WORK/superlink.log" 2>&1 &
STARTED+=($!); disown
for _ in $(seq 120); do
  (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null && break
  kill -0 "${STARTED[0]}" 2>/dev/null || { cat "$WORK/superlink.log"; exit 1; }
  sleep 0.5
done

echo "== $NODES SuperNodes, registered by their public keys"
for i in $(seq 0 $((NODES - 1))); do
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$WORK/node$i"
  flwr supernode register "$WORK/node$i.pub" loopback --name "site$i" --format json > "$WORK/register$i.json"
  flower-supernode --root-certificates "$WORK/ca.crt" --superlink "127.0.0.1:$PORT" \
    --auth-supernode-private-key "$WORK/node$i" --host 127.0.0.1 --port $((NODE_PORT + i)) \
    --node-config "partition-id=$i num-partitions=$NODES" > "$WORK/node$i.log" 2>&1 &
  STARTED+=($!); disown
  echo "   site$i is node $(grep -o '[0-9]\{5,\}' "$WORK/register$i.json")"
done

echo "== flwr run (nodes 3 and 4 are malicious)"
BEGAN=$SECONDS
RUN_CONFIG="store=\"$WORK/results.sqlite\" ${1:-}"
flwr run "$HERE" loopback --run-config "$RUN_CONFIG" --format json > "$WORK/run.json"
RUN=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["run-id"])' "$WORK/run.json")
while true; do
  # `flwr run --stream` exits 0 even if the run failed: its status is what counts.
  STATUS=$(flwr ls loopback --run-id "$RUN" --format json |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["runs"][0]["status"])' || echo unknown)
  case "$STATUS" in finished:*) break ;; esac
  if [ $((SECONDS - BEGAN)) -gt "$LIMIT" ]; then echo "not finished within $LIMIT s ($STATUS)"; exit 1; fi
  sleep 10
done
flwr log "$RUN" loopback --show 2>/dev/null | grep -E "round [0-9]+ of|test accuracy|weight|Error" || true
echo "== $STATUS after $((SECONDS - BEGAN)) s"
[ "$STATUS" = "finished:completed" ]
