#!/usr/bin/env bash
# install_agents.sh VENV: installs the `openai` client and frameworks for agents in an own environment VENV, without Windlass.
set -euo pipefail
venv=$1
marker=$venv/.installed-agents
checksum=$(cat "$0" | sha256sum)
[ -e "$marker" ] && [ "$(cat "$marker")" = "$checksum" ] && exit 0
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
  openai==3.57.0 openai-agents==0.24.0 "pydantic-ai-slim[openai]==2.68.0" langchain-openai==1.7.4 langgraph==1.2.24
echo "$checksum" >"$marker"
