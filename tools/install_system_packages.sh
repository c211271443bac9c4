#!/usr/bin/env bash
# The one system package Windlass can use: libibverbs, which Mooncake's TransferEngine links to.
# Installed where this user may install; named, and gone on without, where not.
set -u
if ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1'; then
  exit 0
fi
if command -v apt-get >/dev/null 2>&1; then
  sudo=""
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null && sudo="sudo -n" || sudo="missing"
  fi
  if [ "$sudo" != "missing" ]; then
    if $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends libibverbs1; then
      exit 0
    fi
  fi
fi
echo "windlass: libibverbs1 is not installed and could not be: the mooncake transport will be unavailable." >&2
echo "windlass: install it with your package manager (Debian/Ubuntu: apt-get install libibverbs1)." >&2
exit 0
