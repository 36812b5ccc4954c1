/* Whether what an index holds in memory is whole. Each check takes time linear in the size of the index times the length of
 * its suffix chains, changes nothing, and returns NULL, or the first broken invariant that it finds. */
#ifndef RS_CHECKS_H
#define RS_CHECKS_H

#include "index.h"

const char *rs_automaton_check(const rs_automaton *automaton);

const char *rs_index_check(const rs_index *index);

#endif
