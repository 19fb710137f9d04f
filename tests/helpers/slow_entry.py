"""The entry of a child process that takes a minute to import."""

import time

time.sleep(60)
