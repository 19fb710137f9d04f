#!/usr/bin/env bash
# All set-up for `make serve` and `make test` on a fresh Debian/Ubuntu machine with Python >= 3.11.
# Usage: scripts/setup.sh VENV serve|test. A stamp in the venv makes second runs start at once.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
purpose=$2

# Bold only where it is seen as such: on a terminal, and where NO_COLOR does not ask for plain text.
bold= plain=
if [ -t 2 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
  bold=$'\033[1m' plain=$'\033[0m'
fi
say() { printf '%s[setup]%s %s\n' "$bold" "$plain" "$*" >&2; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then platform=cuda; else platform=cpu; fi
files=(setup.py pyproject.toml CMakeLists.txt requirements/common.txt "requirements/$platform.txt" scripts/setup.sh)
[ "$purpose" = test ] && files+=(requirements/test.txt)
mapfile -t native < <(find csrc -type f 2>/dev/null | LC_ALL=C sort)
key=$({ echo "$platform $PWD"; cat "${files[@]}" ${native[@]+"${native[@]}"} 2>/dev/null || true; } | sha256sum | cut -d' ' -f1)
[ "$(cat "$venv/.ready-$purpose" 2>/dev/null)" = "$key" ] && exit 0

# One set-up at a time, also when two commands start together.
exec 9>".venv.lock"
if command -v flock >/dev/null 2>&1; then flock 9; fi
[ "$(cat "$venv/.ready-$purpose" 2>/dev/null)" = "$key" ] && exit 0

if [ ! -x "$venv/bin/python" ]; then
  python=
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || die "Python 3.11 or newer is needed (apt-get install python3)"
  say "creating $venv with $("$python" --version)"
  if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
    # Debian splits ensurepip off into a package of its own.
    rm -rf "$venv"
    say "the venv module is incomplete; trying to install it"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      apt-get update -qq && apt-get install -y -qq "$(basename "$python")-venv" >/dev/null 2>&1 ||
        apt-get install -y -qq python3-venv >/dev/null
      "$python" -m venv "$venv"
    else
      "$python" -m pip install --quiet --user virtualenv && "$python" -m virtualenv --quiet "$venv" ||
        die "please run: sudo apt-get install python3-venv"
    fi
  fi
fi

# Seconds passed, every ten of them, until the process with the id $1 is gone. For steps that say nothing themselves.
clock() {
  local seconds=0 nap
  trap 'kill "$nap"; exit 0' TERM
  while sleep 10 & nap=$!; wait "$nap" && kill -0 "$1" 2>/dev/null; do
    seconds=$((seconds + 10))
    printf '  … %d s\n' "$seconds" >&2
  done
}
# One short line per package, so that minutes of downloads show progress.
get() {
  local status=0 ticking
  clock $$ 9>&- &
  ticking=$!
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" |
    sed -un -E 's/^Collecting ([^ ]+).*/  \1/p; s/^Installing collected packages:.*/  unpacking/p' >&2 || status=$?
  kill "$ticking" 2>/dev/null || true
  wait "$ticking" 2>/dev/null || true
  return "$status"
}
say "installing the $platform requirements (a few minutes the first time)"
# torch first and alone: the pin keeps pip from resolving anything else against another build of it.
# PyPI's torch for Linux brings gigabytes of CUDA; the CPU build lies in an index of its own and, where that answers, wins.
cpu_index=https://download.pytorch.org/whl/cpu
index=()
if [ "$platform" = cpu ] && "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
  "$cpu_index/torch/" >/dev/null 2>&1; then
  index=(--extra-index-url "$cpu_index")
fi
get ${index[@]+"${index[@]}"} "$(grep -h '^torch' "requirements/$platform.txt")"
get -r "requirements/$platform.txt" setuptools wheel
if [ "$purpose" = test ]; then
  say "installing the test requirements"
  get -r requirements/test.txt
  # The live cache page is tested in a real browser; without one that test skips itself.
  browsers='chromium chromium-browser google-chrome google-chrome-stable'
  if ! command -v $browsers >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      say "installing chromium for the test of the cache page"
      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        chromium fonts-dejavu-core; } >/dev/null 2>&1 || true
    fi
    command -v $browsers >/dev/null 2>&1 ||
      say "NOTICE: no chromium found (as root: apt-get install chromium); the test of the cache page is skipped"
  fi
fi
if ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1; then
  say "NOTICE: no C++ compiler found; the torch reference ops are used (slower decode)"
elif ! command -v cmake >/dev/null 2>&1; then
  # The compiler is there; CMake and Ninja come as wheels.
  get cmake ninja
fi
if ! "$venv/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
  # Debian splits the headers off; without them the KV core stays in Python.
  headers=$("$venv/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$headers"; } >/dev/null 2>&1 || true
  fi
  [ -e "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    say "NOTICE: Python's headers are not installed ($headers); the KV core runs in Python (slower, more memory per block)"
fi
say "installing the package and building native ops"
log=$(mktemp)
# CMake's own lines, Ninja's or make's, tell how far the compiler is.
if ! PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -v -e . 2>&1 |
  tee "$log" | sed -un -E 's/^ *\[ *([0-9]+(%|\/[0-9]+))\] (Building|Linking).*/  \1 compiled/p' >&2; then
  cat "$log" >&2
  die "installing the package failed"
fi
grep -h 'NOTICE:' "$log" >&2 || true
rm -f "$log"
echo "$key" >"$venv/.ready-$purpose"
say "done"
