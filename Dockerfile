# The image of rlstack for clusters: `rlstack cluster` writes the files that use it.
#
#   docker build -t rlstack:latest .                          for CPUs
#   docker build -t rlstack:gpu --build-arg DEVICE=gpu .      with CUDA 12; its host needs a driver
#
# Versions are those of requirements.lock. Agents and presets of your own: COPY them to /work.
FROM python:3.13-slim

ARG DEVICE=cpu
RUN apt-get update && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/rlstack
WORKDIR /opt/rlstack
# ray[default] has the dashboard, to which KubeRay submits jobs.
RUN sed -e '/--hash=/d' -e '/^ *#/d' -e 's/ \\$//' requirements.lock > /tmp/constraints.txt \
    && case "$DEVICE" in cpu) extras=cluster,store ;; gpu) extras=cluster,store,cuda ;; \
       *) echo "DEVICE must be cpu or gpu; got $DEVICE" >&2; exit 1 ;; esac \
    && pip install --no-cache-dir -c /tmp/constraints.txt ".[$extras]" "ray[default]" \
    && rlstack doctor > /dev/null

WORKDIR /work
