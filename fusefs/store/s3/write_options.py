"""Storage class, encryption and ACL of the objects that a mount makes.

S3 takes these with the requests that begin an object: PUT, COPY and the beginning of a
multipart upload.
A copy keeps the storage class of its source, as a rename is to change nothing but the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusefs.settings.types import AttributeForm, Encryption

if TYPE_CHECKING:
    from fusefs.settings.mount import MountSettings

_ENCRYPTION = "x-amz-server-side-encryption"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """None leaves a choice to the bucket. `kms_key` is an id, an ARN or an alias.

    With `is_aws_form` a copy says its source's time as AWS's services do, not as s3fs does.
    """

    storage_class: str | None = None
    encryption: str | None = None
    kms_key: str | None = None
    acl: str | None = None
    is_aws_form: bool = False

    @classmethod
    def of(cls, settings: MountSettings) -> WriteOptions:
        """The options that a mount's settings choose."""
        # A key alone is for the usual way of using it.
        encryption = settings.encryption or (Encryption.KMS if settings.kms_key else None)
        is_aws_form = settings.attribute_form is AttributeForm.AWS
        return cls(settings.storage_class, encryption, settings.kms_key, settings.acl, is_aws_form)

    def headers(self) -> dict[str, str]:
        """The headers, with names in lower case."""
        chosen = {
            "x-amz-storage-class": self.storage_class,
            _ENCRYPTION: self.encryption,
            f"{_ENCRYPTION}-aws-kms-key-id": self.kms_key,
            # One request to KMS for many objects. S3 has no such keys for double encryption.
            f"{_ENCRYPTION}-bucket-key-enabled": "true" if self.encryption == "aws:kms" else None,
            "x-amz-acl": self.acl,
        }
        return {name: text for name, text in chosen.items() if text is not None}


NO_OPTIONS = WriteOptions()
