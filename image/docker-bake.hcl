# The image for both architectures, from the top of the repository:
#
#     IMAGE=registry.example.com/fusefs-csi docker buildx bake --file image/docker-bake.hcl --push
#
# Each tag is an index of two images with their attestations: how they were built (provenance), and
# the packages of Debian and of Python that BuildKit's scanner finds (SBOM). The list that the build
# writes itself is in each image, /opt/fusefs/share/sbom.json.

variable "IMAGE" {
  default = "registry.example.com/fusefs-csi"
}

variable "VERSION" {
  default = "0.2.0"
}

# The commit and the repository that are built, for the labels: REVISION=$(git rev-parse HEAD)
variable "REVISION" {
  default = ""
}

variable "SOURCE" {
  default = ""
}

# The same time in every layer, so that two builds of a commit are equal:
# SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
variable "SOURCE_DATE_EPOCH" {
  default = "0"
}

group "default" {
  targets = ["image"]
}

target "image" {
  context    = "."
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:${VERSION}"]
  args = {
    VERSION           = VERSION
    REVISION          = REVISION
    SOURCE            = SOURCE
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
  output = ["type=image,rewrite-timestamp=true"]
}

# For this machine's own engine, which takes no attestations. An empty list would remove none, because
# bake adds it to the inherited one: docker buildx bake --file image/docker-bake.hcl local
target "local" {
  inherits  = ["image"]
  platforms = []
  attest    = ["type=provenance,disabled=true", "type=sbom,disabled=true"]
  output    = ["type=docker"]
}
