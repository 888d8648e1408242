# The image of the CSI driver: fusefs-csi and fusefs in /opt/fusefs, on Debian with its own Python
# and libfuse (for the pyfuse3 session). What compiles stays in the build stage.
#
#     docker build --tag registry.example.com/fusefs-csi:0.2.0 .
#
# For both architectures, with attestations: image/docker-bake.hcl.
#
# Everything is pinned: the base by its digest, Python packages by version and hash
# (image/*.txt; image/README.md says how they are made), Debian's by their upstream version, so
# that a security revision does not break the build.
FROM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates=20* \
        libcurl4=7.88.* \
        libfuse3-3=3.14.* \
        python3=3.11.* \
        tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 65532 --no-create-home --shell /usr/sbin/nologin fusefs

FROM base AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc=4:12.* \
        libc6-dev=2.36-* \
        libcurl4-openssl-dev=7.88.* \
        libfuse3-dev=3.14.* \
        pkg-config=1.8.* \
        python3-dev=3.11.* \
        python3-venv=3.11.* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY image/build.txt image/requirements.txt image/sbom.txt image/
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r image/build.txt \
    && /build/bin/pip wheel --no-cache-dir --no-build-isolation --require-hashes \
        --wheel-dir /wheels -r image/requirements.txt \
    && python3 -m venv /sbom \
    && /sbom/bin/pip install --no-cache-dir --require-hashes -r image/sbom.txt
COPY pyproject.toml setup.py README.md ./
COPY proto proto
COPY fusefs fusefs
COPY csi csi
# Compiled so that Python does not compare times, which a reproducible build sets to one value.
RUN /build/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python3 -m venv --without-pip /opt/fusefs \
    && /build/bin/pip --python /opt/fusefs/bin/python install --no-cache-dir --no-index \
        --no-compile --no-deps /wheels/*.whl \
    && /opt/fusefs/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/fusefs/lib \
    && mkdir /opt/fusefs/share \
    && /sbom/bin/cyclonedx-py environment --output-reproducible \
        --output-file /opt/fusefs/share/sbom.json /opt/fusefs/bin/python

FROM base
ARG VERSION=0.2.0
ARG REVISION
ARG SOURCE
# No time of creation: the same sources make the same image.
LABEL org.opencontainers.image.title="fusefs-csi" \
      org.opencontainers.image.description="CSI driver that gives S3 buckets to pods" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="NOASSERTION" \
      org.opencontainers.image.base.name="docker.io/library/debian:bookworm-20260824-slim"
COPY --from=build /opt/fusefs /opt/fusefs
ENV PATH=/opt/fusefs/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The controller's user. The manifests give root to the two containers that need it.
USER 65532:65532
# PID 1 adopts what keepers leave behind, and must collect it.
ENTRYPOINT ["/usr/bin/tini", "--", "fusefs-csi"]
