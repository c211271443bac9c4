#!/usr/bin/env bash
# Installs the programs of a Slurm cluster from the distribution's packages, for the scheduler tests. It configures and
# starts nothing: the tests write their own configuration and start their own daemons.
set -eu
if command -v slurmctld >/dev/null 2>&1 && command -v munged >/dev/null 2>&1; then
  exit 0
fi
sudo=""
[ "$(id -u)" -eq 0 ] || sudo="sudo -n"
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends munge slurmctld slurmd slurm-client
