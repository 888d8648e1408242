"""Tests that Ceph's gateway 16.2 can't pass, and why: what it does not have, or does otherwise.

They are skipped with `--store ceph`. What fusefs makes of each of these is in
tests/store/writes/test_like_ceph.py and in the tests of probes and conditions.
"""

from fnmatch import fnmatchcase

LACKS = {
    "it honours no If-Match of DELETE and COPY, and no condition of CompleteMultipartUpload": [
        "tests/store/writes/test_fencing.py::test_this_server_honours_all_of_it_and_nothing_is_made",
        "tests/store/writes/test_fencing.py::test_what_a_store_ignores_is_found*",
        "tests/store/writes/test_fencing.py::test_a_copy_over_an_expected_object_still_wants_its_source",
        "tests/store/writes/test_fencing.py::test_a_repeated_delete_removes_nothing_of_anothers*",
        "tests/store/writes/test_fencing.py::test_a_delete_goes_over_another_object_only_where_it_adopts",
        "tests/store/writes/test_fencing.py::test_of_many_only_those_that_are_meant_are_deleted",
        "tests/store/writes/test_fencing.py::test_many_deletes_that_are_repeated_remove_nothing_*",
        "tests/store/writes/test_fencing.py::test_etags_of_deletes_that_a_store_ignores_are_not_*",
        "tests/store/writes/test_answers.py::test_another_object_with_the_same_bytes_*parts*",
        "tests/store/writes/test_copies.py::test_another_version_than_the_named_one_is_not_copied",
        "tests/store/writes/test_copies.py::test_where_there_was_to_be_nothing_nothing_*",
        "tests/store/writes/test_copies.py::test_a_copy_whose_answer_was_lost_is_not_in_*",
        "tests/store/writes/test_writes.py::test_a_new_object_is_made_only_where_*10485760*",
        "tests/store/writes/test_writes.py::test_only_the_named_version_is_replaced*10485760*",
        "tests/store/writes/test_writes.py::test_a_version_that_was_deleted_*10485760*",
        "tests/mounted/write/test_conditional_changes.py::test_changes_carry_conditions",
        "tests/mounted/write/test_conditional_changes.py::test_a_repeated_delete_removes_*",
        "tests/mounted/write/test_conditional_changes.py::test_what_replaces_a_file_while_*",
        "tests/mounted/write/test_conditional_changes.py::test_what_the_store_honours_is_*",
        "tests/mounted/write/test_exclusive.py::test_the_second_of_two_nodes_*data2*",
        "tests/mounted/attributes/test_attributes.py::test_what_somebody_else_has_replaced_is_*",
        "tests/survival/test_late_requests.py::*on]",
    ],
    "a change costs a HEAD more, and a PUT until the probes have ended": [
        "tests/mounted/attributes/test_attributes.py::test_truncating_a_closed_file_is_one_upload",
        "tests/mounted/attributes/test_attributes.py::test_attributes_of_an_open_file_go_up_*",
        "tests/mounted/attributes/test_xattrs.py::test_a_file_that_is_being_written_goes_up_*",
        "tests/mounted/write/test_exclusive.py::test_a_process_that_copies_reserves_its_first_*",
    ],
    "it has one storage class": [
        "tests/store/writes/test_writes.py::test_a_head_tells_metadata_with_keys_in_lower_case*",
        "tests/store/writes/test_copies.py::test_what_was_listed_is_copied_with_one_request*",
        "tests/store/writes/test_write_options.py::test_each_way_of_writing_asks_for_it*",
        "tests/store/writes/test_write_options.py::test_a_rename_keeps_the_class_of_the_object",
        "tests/csi/controller/test_creating.py::test_a_record_is_written_as_the_volumes_*",
    ],
    "it takes keys of customers over TLS alone": [
        "tests/store/writes/test_customer_key.py::test_the_key_goes_with_each_request_*",
        "tests/store/writes/test_customer_key.py::test_a_mount_and_its_next_daemon_have_the_key_*",
    ],
    "it fails at an upload in parts under a key with a control character": [
        "tests/store/writes/test_writes.py::test_a_file_arrives_as_it_is*x01*",
        "tests/store/writes/test_like_ceph.py::test_a_body_goes_with_its_md5_unless_*parts*",
    ],
    "it has neither checksums nor tags of what is made of parts": [
        "tests/store/writes/test_resumed.py::test_copied_parts_are_not_copied_again_*",
        "tests/store/writes/test_copies.py::test_tags_go_with_a_copy*parts*",
    ],
    "it completes no upload of which parts are left out": [
        "tests/store/writes/test_growing.py::test_a_file_that_was_cut_short_is_complete_*"
    ],
    "the test changes the identities of SeaweedFS": [
        "tests/csi/identities/test_oidc.py::*",
        "tests/csi/identities/test_identities.py::test_one_identity_gets_at_nothing_of_another",
        "tests/csi/identities/test_identities.py::test_identities_share_a_cache_where_*",
        "tests/csi/identities/test_identities.py::test_rotated_keys_are_used_when_*",
        "tests/csi/identities/test_revocation.py::test_who_is_shut_out_reads_nothing_cached_*",
        "tests/csi/node/test_node_model.py::test_a_node_keeps_its_promises_in_any_order_*",
    ],
}


def reason(test: str) -> str:
    """Why a test is skipped; "" if it runs."""
    test = test.replace("[", "*")
    for why, patterns in LACKS.items():
        if any(fnmatchcase(test, pattern.replace("[", "*")) for pattern in patterns):
            return why
    return ""
