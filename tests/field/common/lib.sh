# Sourced by each `run`. HR_VENV: the virtual environment under test; SCRATCH ($1 or HR_SCRATCH): where to work.
VENV=$(readlink -f "${HR_VENV:?the virtual environment under test}"); BIN=$VENV/bin; PY=$BIN/python; ROOT=$(dirname "$VENV")
HERE=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd); COMMON=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
S=${1:-${HR_SCRATCH:-$(mktemp -d)}}; CACHE=${TINY_CACHE:-$S/.models}
W=$S/$(basename "$HERE"); rm -rf "$W"; mkdir -p "$W" "$CACHE"
find "$HERE" -mindepth 1 -maxdepth 1 ! -name run -exec cp -r {} "$W"/ \;
cp -n "$COMMON"/*.py "$COMMON"/calls.sh "$COMMON"/data.jsonl "$W"/; cd "$W" || exit 9
export PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false COLUMNS=200
BAD=0
tiny() { # FAMILY DIR [key=json…]
  local dir=$2 key; key=$(echo "$1 ${*:3}" | md5sum | cut -c1-12)
  [ -f "$CACHE/$key/config.json" ] || "$PY" "$COMMON/tiny.py" "$1" "$CACHE/$key" "${@:3}" >/dev/null 2>&1
  rm -rf "$dir"; cp -r "$CACHE/$key" "$dir"
}
# a busy machine is twice as slow; no case counts on the end of its time
hr() { timeout -k 5 "$(( ${LIMIT:-60} * 2 ))" "$BIN/headrace" "$@"; }
job() { # NAME STEPS key=yaml… > job.yaml;  key=~ removes a key
  "$PY" - "$@" <<'PY'
import sys, yaml
base = {"name": sys.argv[1], "steps": int(sys.argv[2]), "model": {"path": "model"},
  "data": {"source": "jsonl", "path": "data.jsonl"}, "reward": {"kind": "function", "function": "rw:score"},
  "algorithm": {"group_size": 4, "prompts_per_step": 2}, "rollout": {"workers": 1, "max_tokens": 16},
  "trainer": {"lr": 1e-3}, "metrics": {"tensorboard": False}}
for a in sys.argv[3:]:
    k, v = a.split("=", 1); at = base
    *p, last = k.split(".")
    for x in p: at = at.setdefault(x, {})
    if v == "DEL": at.pop(last, None)
    else: at[last] = yaml.safe_load(v)
yaml.safe_dump(base, open("job.yaml", "w"), sort_keys=False)
PY
}
pass() { echo "PASS  $*"; }
fail() { echo "FAIL: $*"; BAD=1; }
verdict() { if eval "$2"; then pass "$1"; else fail "$1"; fi; }
finish() { exit $BAD; }
