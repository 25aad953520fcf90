#define SYS_INIT(function, level, priority) \
    __attribute__((constructor)) static void machine_start(void) { (void)function(); } \
    typedef int machine_started
