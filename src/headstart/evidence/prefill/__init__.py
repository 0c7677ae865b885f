"""The main job: a real model prefilled, hit and compared (`headstart prefill`).

It needs the extra `models`.
"""
