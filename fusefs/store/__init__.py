"""The bucket: see contract.py."""

import os

# Where awscrt is installed, which computes checksums here, botocore would sign with it and import
# it for every client: a second way of signing, and a slower start.
os.environ.setdefault("BOTO_DISABLE_CRT", "true")
