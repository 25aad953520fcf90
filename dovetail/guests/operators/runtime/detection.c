/* e to a power, in double: the power's multiple of ln 2 is taken out, a Taylor series for the rest. */
static double double_exp(double x)
{
    if (!(x > -760.0)) {
        return x == x ? 0.0 : x;
    }
    x = x < 720.0 ? x : 720.0;
    const int32_t power = (int32_t)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    const double high = (double)power * 0.693147180369123816490;
    const double low = (double)power * 1.90821492927058770002e-10;
    const double rest = x - high - low;
    double sum = 1.0;
    for (int32_t term = 13; term > 0; --term) {
        const double next = sum * rest / (double)term;
        sum = 1.0 + next;
    }
    double factor = power < 0 ? 0.5 : 2.0;
    for (int32_t left = power < 0 ? -power : power; left > 0; left >>= 1) {
        sum = (left & 1) != 0 ? sum * factor : sum;
        factor *= factor;
    }
    return sum;
}

/* The corners (top, left, bottom, right) of a box that is said relative to its anchor (y, x, height, width). */
static void box_corners(float *corners, const float *box, const float *anchor, const float *scales)
{
    for (int32_t axis = 0; axis < 2; ++axis) {
        const double size = (double)anchor[2 + axis];
        const double away = (double)box[axis] / (double)scales[axis] * size;
        const float centre = (float)(away + (double)anchor[axis]);
        const float half = (float)(0.5 * double_exp((double)box[2 + axis] / (double)scales[2 + axis]) * size);
        corners[axis] = centre - half;
        corners[2 + axis] = centre + half;
    }
}

/* The area two boxes share, as a part of the area they cover. */
static float boxes_shared(const float *a, const float *b)
{
    const float area_a = (a[2] - a[0]) * (a[3] - a[1]);
    const float area_b = (b[2] - b[0]) * (b[3] - b[1]);
    if (area_a <= 0.0f || area_b <= 0.0f) {
        return 0.0f;
    }
    const float rows = (a[2] < b[2] ? a[2] : b[2]) - (a[0] > b[0] ? a[0] : b[0]);
    const float columns = (a[3] < b[3] ? a[3] : b[3]) - (a[1] > b[1] ? a[1] : b[1]);
    const float shared = (rows > 0.0f ? rows : 0.0f) * (columns > 0.0f ? columns : 0.0f);
    const float both = area_a + area_b;
    return shared / (both - shared);
}

/* What the functions below have in common. */
struct detector {
    const float *boxes;
    const float *predictions; /* of the first label in the first row */
    const float *anchors;
    const float *scales;
    float *values;
    int32_t *heap;
    int32_t *kept;
    float *corners;
    int32_t count;
    int32_t coordinates;
    int32_t columns;
    int32_t labels;
    float least;
    float most_shared;
};

/* Where results go. */
struct detections {
    float *boxes;
    float *classes;
    float *scores;
};

static void put_detection(
    const struct detections *all, int32_t place, const float *corners, int32_t label, float score)
{
    for (int32_t edge = 0; edge < 4; ++edge) {
        all->boxes[4 * place + edge] = corners[edge];
    }
    all->classes[place] = (float)label;
    all->scores[place] = score;
}

/* The places of the best boxes by their values, none of which shares more with a better one than it may: `kept`, and
   their corners. Returns how many. */
static int32_t best_boxes(const struct detector *one, int32_t most)
{
    const float *values = one->values;
    int32_t *heap = one->heap;
    int32_t waiting = 0;
    int32_t found = 0;
    for (int32_t at = 0; at < one->count; ++at) {
        if (values[at] >= one->least) {
            heap[waiting++] = at;
        }
    }
    places_heap(heap, waiting, values);
    for (; waiting > 0 && found < most; --waiting) {
        const int32_t at = places_take(heap, waiting, values);
        float *own = one->corners + 4 * found;
        int32_t other = 0;
        box_corners(own, one->boxes + one->coordinates * at, one->anchors + 4 * at, one->scales);
        while (other < found && !(boxes_shared(one->corners + 4 * other, own) > one->most_shared)) {
            ++other;
        }
        if (other == found) {
            one->kept[found++] = at;
        }
    }
    return found;
}

/* Boxes of all classes together, each with its best class. */
static int32_t detect_fast(const struct detector *one, const struct detections *all, int32_t most)
{
    for (int32_t at = 0; at < one->count; ++at) {
        const float *row = one->predictions + at * one->columns;
        one->values[at] = row[0];
        for (int32_t label = 1; label < one->labels; ++label) {
            one->values[at] = row[label] > one->values[at] ? row[label] : one->values[at];
        }
    }
    const int32_t found = best_boxes(one, most);
    for (int32_t place = 0; place < found; ++place) {
        const int32_t at = one->kept[place];
        int32_t label = 0;
        while (label + 1 < one->labels && one->predictions[at * one->columns + label] != one->values[at]) {
            ++label;
        }
        put_detection(all, place, one->corners + 4 * place, label, one->values[at]);
    }
    return found;
}

/* Boxes of each class by itself, the best of all classes in the results. */
static int32_t detect_regular(
    const struct detector *one, const struct detections *all, int32_t most, int32_t most_of_class)
{
    int32_t found = 0;
    for (int32_t label = 0; label < one->labels; ++label) {
        for (int32_t at = 0; at < one->count; ++at) {
            one->values[at] = one->predictions[at * one->columns + label];
        }
        const int32_t own = best_boxes(one, most_of_class);
        for (int32_t number = 0; number < own; ++number) {
            const float score = one->values[one->kept[number]];
            if (found == most && !(score > all->scores[most - 1])) {
                break;
            }
            int32_t place = found < most ? found++ : most - 1;
            for (; place > 0 && score > all->scores[place - 1]; --place) {
                const int32_t last = place - 1;
                put_detection(all, place, all->boxes + 4 * last, (int32_t)all->classes[last], all->scores[last]);
            }
            put_detection(all, place, one->corners + 4 * number, label, score);
        }
    }
    return found;
}

static void detect(
    float *boxes, float *classes, float *scores, float *count, const float *encoded, const float *predictions,
    const float *anchors, const float *scales, float *values, int32_t *heap, int32_t *kept, float *corners,
    int32_t places, int32_t coordinates, int32_t columns, int32_t labels, float least, float most_shared, int32_t room,
    int32_t most, int32_t regular, int32_t most_of_class)
{
    const struct detections all = {boxes, classes, scores};
    const struct detector one = {
        encoded, predictions + (columns - labels), anchors, scales, values, heap, kept, corners,
        places, coordinates, columns, labels, least, most_shared};
    const float nowhere[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t place = 0; place < room; ++place) {
        put_detection(&all, place, nowhere, 0, 0.0f);
    }
    *count = (float)(regular != 0 ? detect_regular(&one, &all, most, most_of_class) : detect_fast(&one, &all, most));
}
