#include "maeri_order.h"

%(arrays)s
void maeri_run(void)
{
    for (uint32_t number = 0; number < MAERI_PHASES; ++number) {
        const maeri_phase_t *phase = &maeri_phases[number];
        maeri_wait_until(phase->start);
        maeri_configure(&maeri_words[phase->words]);
        for (uint32_t item = 0; item < phase->items; ++item) {
            maeri_start(&maeri_items[phase->item + item]);
        }
    }
    maeri_wait_until(MAERI_MAKESPAN);
}
