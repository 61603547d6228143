# Two images of the program `grpo`; docs/first-run.md shows how to run them. Docker's default builder, BuildKit, is required.
#
#   docker build --tag grpo .                       # for CPUs
#   docker build --tag grpo:cuda --target cuda .    # for NVIDIA GPUs: with the CUDA plugin and CUDA's libraries

FROM rust:1.95.0-slim-bookworm@sha256:d7482085ff5b415f84dba5647ae71606650bdef00db7aeb69f4b3d170c3e4082 AS build
WORKDIR /grpo
COPY Cargo.toml Cargo.lock ./
# Cargo reads the manifest of every member of the workspace.
COPY tests/Cargo.toml tests/lib.rs tests/
# The binary contains files of both folders, to which packages have links.
COPY configs configs
COPY peers peers
COPY crates crates
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/grpo/target \
    cargo build --release --locked --bin grpo && \
    install --strip target/release/grpo /usr/local/bin/grpo

FROM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS base
RUN useradd --create-home --uid 1000 grpo && \
    install --directory --owner grpo --group grpo /work /home/grpo/.cache
COPY --from=build /usr/local/bin/grpo /usr/local/bin/grpo
USER 1000
# Runs are written to ./runs: mount a folder here.
WORKDIR /work
ENTRYPOINT ["grpo"]
CMD ["--help"]

# This stage has Python and pip, which the images do not need.
FROM python:3.13.14-slim-bookworm@sha256:9d7f287598e1a5a978c015ee176d8216435aaf335ed69ac3c38dd1bbb10e8d64 AS cuda-files
COPY scripts/cuda-libraries.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --only-binary=:all: --target /tmp/cuda --requirement /tmp/cuda-libraries.txt && \
    mkdir --parents /opt/cuda/lib && \
    cp --recursive /tmp/cuda/nvidia/*/lib/. /opt/cuda/lib
COPY --from=build /usr/local/bin/grpo /usr/local/bin/grpo
# Every user of the image may load a plugin that belongs to root.
RUN XDG_CACHE_HOME=/tmp/cache grpo plugin install cuda && \
    mv /tmp/cache/grpo/plugins/cuda-*/ /opt/cuda/plugin

FROM base AS cuda
COPY --from=cuda-files /opt/cuda /opt/cuda
ENV GRPO_PJRT_PLUGIN=/opt/cuda/plugin/jax_plugins/xla_cuda13/xla_cuda_plugin.so \
    LD_LIBRARY_PATH=/opt/cuda/lib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The last stage is the default.
FROM base AS cpu
