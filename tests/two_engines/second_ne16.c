#include "second_ne16.h"

#define NE16_BASE SECOND_NE16_BASE
#define ne16_init second_init
#define ne16_start second_start
#define ne16_wait second_wait
#define ne16_finished second_finished
#include "ne16.c"
