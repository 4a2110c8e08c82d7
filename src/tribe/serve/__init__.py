"""Serve many adapting streams of one network to clients on other machines.

The extra `serve`: ``pip install 'tribe-tta[serve]'``. From a shell: ``tribe serve``. See docs/serving.md.
"""
