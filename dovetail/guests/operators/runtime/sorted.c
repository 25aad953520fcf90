/* A heap of places: the place with the largest value is on top, of equal values the lowest. */
static int place_before(const float *values, int32_t a, int32_t b)
{
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

static void places_sink(int32_t *places, int32_t count, int32_t at, const float *values)
{
    const int32_t moved = places[at];
    for (int32_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && place_before(values, places[child + 1], places[child])) {
            ++child;
        }
        if (!place_before(values, places[child], moved)) {
            break;
        }
        places[at] = places[child];
        at = child;
    }
    places[at] = moved;
}

static void places_heap(int32_t *places, int32_t count, const float *values)
{
    for (int32_t at = count / 2 - 1; at >= 0; --at) {
        places_sink(places, count, at, values);
    }
}

/* Takes the top; the heap has one place less then. */
static int32_t places_take(int32_t *places, int32_t count, const float *values)
{
    const int32_t top = places[0];
    places[0] = places[count - 1];
    places_sink(places, count - 1, 0, values);
    return top;
}
