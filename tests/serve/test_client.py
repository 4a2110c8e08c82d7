"""`tribe.serve.Client` goes on after a request that failed."""

import pytest
from http_calls import IMAGES
from small_server import listening

from tribe.serve import Client


def test_the_client_goes_on_after_a_refused_connection():
    """A connection that failed was kept, and every later request raised CannotSendRequest."""
    with listening() as server:
        client = Client(server.url, "small")
        assert client.predict("cam", IMAGES).shape == (2, 4)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            client.predict("cam", IMAGES)
    with listening(port=server.port), client:
        assert client.predict("cam", IMAGES).shape == (2, 4)
