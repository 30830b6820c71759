package sessions

import "os"

const crashEnv = "ROCKET_TEST_CRASH_SERVER"

func crashServer() { os.Exit(3) }
