"""Everything that touches the outside: servers, routers and training frameworks."""
