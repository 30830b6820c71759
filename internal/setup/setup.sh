#!/bin/bash
# Installs what Rocket needs and this machine lacks: PostgreSQL's programs (initdb, postgres), and with
# --browser also Chromium. Says what it does; does nothing when nothing is missing.
# Go and a C compiler are only asked for: they are a person's choice.
set -euo pipefail

want_browser=no
[ "${1:-}" = "--browser" ] && want_browser=yes

fail() { echo "setup: $*" >&2; exit 1; }

command -v go >/dev/null || fail "Go 1.26 or newer is missing: see https://go.dev/dl"
command -v "${CC:-cc}" >/dev/null || fail "a C compiler is missing (Debian: apt-get install gcc libc6-dev)"

# The same places that the server looks in: the PATH, then Debian's and Homebrew's version folders.
have_postgres() {
  local found
  command -v initdb >/dev/null && return 0
  for found in /usr/lib/postgresql/*/bin/initdb /opt/homebrew/opt/postgresql*/bin/initdb /usr/local/opt/postgresql*/bin/initdb; do
    [ -x "$found" ] && return 0
  done
  return 1
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else fail "installing needs root or sudo: $*"; fi
}

apt_updated=no
apt_install() {
  echo "setup: installing $* with apt-get"
  if [ $apt_updated = no ]; then as_root apt-get update -qq; apt_updated=yes; fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Debian's package starts a cluster of its own on port 5432; Rocket has no use for it, so ask for none.
install_postgres_debian() {
  local conf=/etc/postgresql-common/createcluster.d/rocket-setup.conf
  as_root mkdir -p "$(dirname $conf)"
  echo 'create_main_cluster = false' | as_root tee $conf >/dev/null
  apt_install postgresql
  as_root rm -f $conf
}

if ! have_postgres; then
  if command -v apt-get >/dev/null; then install_postgres_debian
  elif command -v brew >/dev/null; then echo "setup: installing postgresql@17 with brew"; brew install postgresql@17
  else fail "PostgreSQL 15 or newer is missing: install its server programs (initdb, postgres) by hand"; fi
  have_postgres || fail "PostgreSQL was installed, but initdb is not where Rocket looks for it"
fi

if [ $want_browser = yes ]; then
  command -v node >/dev/null || fail "Node 20 or newer is missing (only the browser tests and make web need it)"
  [ "$(node -p 'process.versions.node.split(".")[0]')" -ge 20 ] || fail "Node 20 or newer is needed, this is $(node --version)"
  if ! command -v chromium >/dev/null && ! [ -x "${CHROMIUM:-}" ]; then
    command -v apt-get >/dev/null || fail "Chromium is missing: install it and name it in CHROMIUM"
    apt_install chromium fonts-dejavu-core # without a font, text has no width to click on
  fi
fi
