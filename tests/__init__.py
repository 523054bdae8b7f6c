import gc


# Processes that are forked with torch loaded import the tests whose functions they run. In the
# middle of that, the collector would look at all of torch's objects, for 0.2 s in each process.
gc.freeze()
