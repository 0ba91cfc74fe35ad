"""One module a format; each runs in a process of its own, since some need versions of packages that exclude each other."""
