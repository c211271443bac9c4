#!/usr/bin/env bash
# Unpacks Prometheus and promtool of Debian in FOLDER. Installs and starts no service.
#
#   bash tools/install_prometheus.sh FOLDER
set -euo pipefail
mkdir -p "$1"
cd "$1"
test -x usr/bin/promtool && exit 0
apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg-deb -x prometheus_*.deb .
rm prometheus_*.deb
