/* The edges of a box: lowest and highest along its first axis, then its second; two corners, or centre and sizes. */
static void box_edges(float *edges, const float *box, int32_t centred)
{
    for (int32_t axis = 0; axis < 2; ++axis) {
        const float half = box[2 + axis] / 2.0f;
        const float low = centred != 0 ? box[axis] - half : box[axis];
        const float high = centred != 0 ? box[axis] + half : box[2 + axis];
        edges[2 * axis] = low < high || centred != 0 ? low : high;
        edges[2 * axis + 1] = low < high || centred != 0 ? high : low;
    }
}

/* Whether two boxes share more than a part of the area they cover. */
static int boxes_overlap(const float *a, const float *b, int32_t centred, float most_shared)
{
    float first[4];
    float second[4];
    box_edges(first, a, centred);
    box_edges(second, b, centred);
    float shared = 1.0f;
    for (int32_t axis = 0; axis < 2; ++axis) {
        const int32_t low = 2 * axis;
        const float start = first[low] > second[low] ? first[low] : second[low];
        const float stop = first[low + 1] < second[low + 1] ? first[low + 1] : second[low + 1];
        if (stop <= start) {
            return 0;
        }
        shared *= stop - start;
    }
    const float area_a = (first[1] - first[0]) * (first[3] - first[2]);
    const float area_b = (second[1] - second[0]) * (second[3] - second[2]);
    const float both = area_a + area_b;
    const float covered = both - shared;
    return shared > 0.0f && area_a > 0.0f && area_b > 0.0f && covered > 0.0f && shared / covered > most_shared;
}

/* Rows of image, class and box; those behind the last are -1. */
static void suppress(
    int64_t *chosen, const float *boxes, const float *scores, int32_t *heap, int32_t images, int32_t classes,
    int32_t count, int32_t most, int32_t centred, float most_shared, int32_t has_least, float least, int32_t room)
{
    int32_t found = 0;
    for (int32_t number = 0; number < images * classes; ++number) {
        const float *values = scores + number * count;
        const float *own = boxes + (number / classes) * count * 4;
        const int32_t first = found;
        int32_t waiting = 0;
        for (int32_t at = 0; at < count; ++at) {
            if (has_least == 0 || values[at] > least) {
                heap[waiting++] = at;
            }
        }
        places_heap(heap, waiting, values);
        for (; waiting > 0 && found - first < most; --waiting) {
            const int32_t at = places_take(heap, waiting, values);
            int32_t other = first;
            while (other < found && !boxes_overlap(own + 4 * at, own + 4 * chosen[3 * other + 2], centred, most_shared)) {
                ++other;
            }
            if (other == found) {
                chosen[3 * found] = number / classes;
                chosen[3 * found + 1] = number % classes;
                chosen[3 * found + 2] = at;
                ++found;
            }
        }
    }
    for (int32_t place = 3 * found; place < 3 * room; ++place) {
        chosen[place] = -1;
    }
}
