"""What goes over the wire: pure functions from bytes and headers to a `Request`, and from an `Answer` to bytes.

`v2` is the Open Inference Protocol, `plain` is the API under /v1, `metadata` describes the server and its model, and
`errors` are all answers other than success, with their HTTP status.
"""
