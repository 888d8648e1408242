"""The object store: everything that talks to the S3 bucket; contract.py has its interface."""

import os

# awscrt computes checksums here. Where it is installed, botocore would import it for every client
# and sign with it: a second way of signing, and a slower start.
os.environ.setdefault("BOTO_DISABLE_CRT", "true")
