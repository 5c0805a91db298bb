"""Auxiliary models, which are not trained: served by an engine of the run, or by an endpoint.

- `models`: all of a run's, served here or by an endpoint
- `settings`: checks their settings
- `endpoint`: an endpoint as workflows use it
- `remote`: its clients and its loopback URL, checked and counted
- `remote_transport`: sends requests on another thread's loop
"""
