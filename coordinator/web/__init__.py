"""The web page: a shell around view/page.py, which the coordinator serves from its own process."""

DEFAULT_PAGE = "127.0.0.1:7480"
