/* The earlier places of a sequence's last tokens: what specdist/drafters/plain_ngrams.py does, for all rows of
 * a round in one call. That file says what the results are; tests hold the two equal.
 *
 * A slot's tokens lie in a row of their own. Positions that end in the same two tokens are chained, the latest
 * first: `heads` has the latest one by a hash of the two tokens, `earlier` the one before each. */
#include <stdint.h>

typedef struct {
    int64_t capacity, num_head_bits, num_classes, max_match, max_places;
    const int64_t *class_of;                   /* [max_match + 1] */
    const double *prior_right;                 /* [num_classes] */
    double prior_tried;
    int32_t *tokens, *earlier, *heads;         /* [slots][capacity] twice, [slots][2 ** num_head_bits] */
    int64_t *num_tokens, *num_prompt_tokens;   /* [slots], as the next two */
    int64_t *match_places, *match_lengths;
    double *num_right, *num_tried;             /* [slots][num_classes] */
} Ngrams;

static int64_t hash_of(int32_t before, int32_t last, int64_t num_bits) {
    uint64_t word = ((uint64_t)(uint32_t)before << 32) | (uint32_t)last;
    return (int64_t)((word * 0x9E3779B97F4A7C15ull) >> (64 - num_bits));
}

/* The longest match of the tokens up to `last`, which is not yet in the chain that begins at `place`. */
static void find(const Ngrams *index, int64_t slot, int64_t last, int32_t place) {
    const int32_t *tokens = index->tokens + slot * index->capacity;
    const int32_t *earlier = index->earlier + slot * index->capacity;
    int64_t best_place = -1, best_length = 0, num_places = 0;
    for (; place >= 0 && num_places < index->max_places; place = earlier[place]) {
        if (tokens[place] != tokens[last] || tokens[place - 1] != tokens[last - 1]) continue; /* another hash */
        num_places++;
        int64_t length = 2;
        while (length < index->max_match && length <= place && tokens[place - length] == tokens[last - length])
            length++;
        if (length > best_length) {
            best_place = place;
            best_length = length;
        }
        if (length == index->max_match) break;
    }
    index->match_places[slot] = best_place;
    index->match_lengths[slot] = best_length;
}

void append_tokens(const Ngrams *index, int64_t num_rows, const int64_t *slots, const int64_t *counts,
                   const int32_t *new_tokens) {
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots[row], position = index->num_tokens[slot];
        int64_t num_prompt_tokens = index->num_prompt_tokens[slot], end = position + counts[row];
        int32_t *tokens = index->tokens + slot * index->capacity;
        int32_t *earlier = index->earlier + slot * index->capacity;
        int32_t *heads = index->heads + (slot << index->num_head_bits);
        for (; position < end; position++) {
            int32_t token = *new_tokens++;
            int64_t place = index->match_places[slot];
            if (position >= num_prompt_tokens && place >= 0) {
                int64_t class = slot * index->num_classes + index->class_of[index->match_lengths[slot]];
                index->num_right[class] += tokens[place + 1] == token;
                index->num_tried[class] += 1;
            }
            tokens[position] = token;
            index->match_places[slot] = -1;
            index->match_lengths[slot] = 0;
            if (position == 0) continue;
            int32_t *head = heads + hash_of(tokens[position - 1], token, index->num_head_bits);
            if (position + 1 == end || position + 1 >= num_prompt_tokens) find(index, slot, position, *head);
            earlier[position] = *head;
            *head = (int32_t)position;
        }
        index->num_tokens[slot] = end;
    }
}

/* Returns the number of tokens proposed for all rows, which lie one after the other in `proposed`. */
int64_t propose_tokens(const Ngrams *index, int64_t num_rows, const int64_t *slots, const int64_t *limits,
                       const double *least_chances, int64_t *proposed, double *chances, int64_t *lengths) {
    int64_t total = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots[row], place = index->match_places[slot], depth = 0;
        if (place >= 0) {
            const int32_t *tokens = index->tokens + slot * index->capacity;
            const double *num_right = index->num_right + slot * index->num_classes;
            const double *num_tried = index->num_tried + slot * index->num_classes;
            int64_t period = index->num_tokens[slot] - 1 - place;
            double chance = 1;
            for (; depth < limits[row]; depth++) {
                int64_t length = index->match_lengths[slot] + depth;
                int64_t class = index->class_of[length < index->max_match ? length : index->max_match];
                chance *= (num_right[class] + index->prior_right[class])
                          / (num_tried[class] + index->prior_tried);
                if (chance < least_chances[row]) break;
                proposed[total + depth] = tokens[place + 1 + depth % period];
                chances[total + depth] = chance;
            }
        }
        lengths[row] = depth;
        total += depth;
    }
    return total;
}
