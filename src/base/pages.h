/* pages.h: maps, returns and collapses pages of the operating system. */
#ifndef KVC_PAGES_H
#define KVC_PAGES_H

#include <stddef.h>

enum { KVC_HUGE_PAGE = 2 << 20 }; /* bytes */

size_t kvc_os_page_size(void);

/* Maps memory that is taken only as it is touched, aligned to a huge page if it is that large; NULL on failure.  On
 * Windows it counts against the system's limit at once, as all memory there. */
void *kvc_pages_map(size_t size);
void kvc_pages_unmap(void *p, size_t size);

/* Returns whole pages to the system; they stay addressable and lose their contents, on some systems only once memory is
 * short. */
void kvc_pages_drop(void *p, size_t size);

/* Collapses pages that are written already into huge pages, if the system can.  Unlike advice given beforehand, this
 * takes no memory for what is not written.  Returns whether it succeeded. */
int kvc_pages_collapse(void *p, size_t size);

/* Takes memory for all pages that overlap [p, p + size), whose contents stay.  Returns 0 if the system cannot. */
int kvc_pages_take(void *p, size_t size);

#endif
